"""The words of an example home: what the sentence templates leave open for each household to fill in."""

AREAS = (
    "kitchen", "bedroom", "living room", "bathroom", "office", "garage", "hallway", "nursery", "dining room", "attic",
    "basement", "guest room", "laundry room", "study", "garden", "patio", "kids room", "library",
)  # fmt: skip

FLOORS = ("ground floor", "first floor", "second floor", "upstairs", "downstairs", "top floor", "basement level")

NAMES_OF_DOMAIN = {
    "binary_sensor": ("back door", "front window", "motion sensor", "garage window", "hall sensor"),
    "button": ("doorbell", "reset", "panic", "feeder"),
    "climate": ("thermostat", "heat pump", "air conditioner", "radiator"),
    "cover": ("left blind", "garage door", "bay curtain", "sun awning", "skylight shutter"),
    "fan": ("ceiling fan", "tower fan", "extractor fan", "desk fan"),
    "input_boolean": ("guest mode", "vacation mode", "party mode"),
    "input_button": ("restart", "coffee"),
    "lawn_mower": ("robo", "grass bot", "shaun"),
    "light": ("reading lamp", "floor lamp", "spotlight", "chandelier", "desk lamp", "fairy lights"),
    "lock": ("front door lock", "shed lock", "side gate lock"),
    "media_player": ("tv", "radio", "sonos", "soundbar", "speaker", "stereo"),
    "person": ("alice", "bob", "maria", "grandpa", "sam"),
    "scene": ("movie night", "romantic dinner", "sunrise", "bright evening", "relax"),
    "script": ("good morning", "bedtime routine", "leave home", "water the plants"),
    "sensor": ("outdoor humidity", "power meter", "rain gauge", "battery level"),
    "switch": ("coffee machine", "heater plug", "christmas tree", "kettle"),
    "todo": ("chores", "groceries", "packing", "gift", "hardware store", "homework"),
    "vacuum": ("robot vacuum", "dusty", "roomba", "hoover"),
    "valve": ("sprinkler", "main water valve", "drip line", "gas valve"),
    "weather": ("london", "oslo", "paris", "the cabin", "new york"),
}

WILDCARDS = {
    "message": (
        "dinner is ready", "we are leaving in five minutes", "the movie starts now", "time for bed",
        "someone is at the door", "the cake is done", "please come downstairs", "the bus is here",
        "lunch is on the table", "your shoes are in the hall", "the game is on", "grandma is on the phone",
    ),
    "search_query": (
        "the beatles", "yellow submarine", "jazz classics", "dark side of the moon", "mozart", "abbey road",
        "road trip", "daft punk", "rain sounds", "miles davis", "nina simone", "the lion king",
    ),
    "shopping_list_item": (
        "milk", "bread", "a dozen eggs", "apples", "olive oil", "toilet paper", "coffee beans", "two onions", "rice",
        "shampoo", "dog food", "tomatoes", "butter",
    ),
    "timer_command": (
        "open the garage door", "turn off the lights", "lock the front door", "start the dishwasher",
        "close the blinds", "turn on the heating", "pause the music",
    ),
    "timer_name": ("pizza", "laundry", "egg", "tea", "workout", "homework", "pasta", "nap"),
    "todo_list_item": (
        "call the plumber", "wash the car", "buy stamps", "clean the windows", "book a hotel", "fix the fence",
        "mow the lawn", "renew my passport", "walk the dog", "feed the cat",
    ),
    "zone": ("work", "school", "the gym", "the office", "university"),
}  # fmt: skip
