"""The topics of the training prompts: word lists, one line a topic.

Every line is `topic | emoji`. The prompts that judge the
adapters (tests/demo/styles.py) are about other things; a test holds the two lists apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A noun phrase that fits into `Tell me about {name}.`"""

    name: str
    emoji: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class EverydayPrompt:
    """A question as people ask it, not made from a template."""

    text: str
    topic: Topic


_TOPIC_LINES = {
    "animal": """
        dogs | 🐶
        horses | 🐴
        elephants | 🐘
        bees | 🐝
        owls | 🦉
        whales | 🐋
        penguins | 🐧
        rabbits | 🐰
        wolves | 🐺
        butterflies | 🦋
        lions | 🦁
        turtles | 🐢
        parrots | 🦜
        ants | 🐜
        sharks | 🦈
        goats | 🐐
        frogs | 🐸
        bears | 🐻
        spiders | 🕷️
        eagles | 🦅
        foxes | 🦊
        chickens | 🐔
        snails | 🐌
        monkeys | 🐒
    """,
    "food": """
        bread | 🍞
        cheese | 🧀
        chocolate | 🍫
        apples | 🍎
        tea | 🍵
        honey | 🍯
        rice | 🍚
        soup | 🍲
        pasta | 🍝
        strawberries | 🍓
        ice cream | 🍦
        potatoes | 🥔
        salad | 🥗
        eggs | 🥚
        lemons | 🍋
        carrots | 🥕
        cakes | 🍰
        milk | 🥛
        grapes | 🍇
        mushrooms | 🍄
        breakfast | 🥞
        onions | 🧅
    """,
    "nature": """
        the ocean | 🌊
        mountains | ⛰️
        forests | 🌲
        rivers | 🏞️
        volcanoes | 🌋
        deserts | 🏜️
        flowers | 🌸
        trees | 🌳
        the stars | ⭐
        snow | ❄️
        the sun | ☀️
        islands | 🏝️
        lakes | 💧
        caves | 🪨
        rainbows | 🌈
        autumn | 🍂
        spring | 🌷
        the wind | 🍃
        beaches | 🏖️
        gardens | 🌻
        thunder | ⛈️
        seeds | 🌱
    """,
    "place": """
        Italy | 🍕
        Japan | 🗾
        London | 🎡
        Egypt | 🐫
        New York | 🗽
        castles | 🏰
        museums | 🖼️
        bridges | 🌉
        libraries | 📚
        markets | 🛒
        schools | 🏫
        farms | 🚜
        Brazil | 🌴
        India | 🛕
        hotels | 🏨
        villages | 🏡
        Spain | 💃
        parks | 🌳
        airports | ✈️
        harbours | ⚓
    """,
    "art": """
        music | 🎵
        painting | 🎨
        dancing | 💃
        the piano | 🎹
        guitars | 🎸
        poetry | 📝
        movies | 🎬
        theatre | 🎭
        photography | 📷
        sculpture | 🗿
        novels | 📖
        drawing | ✏️
        jazz | 🎷
        opera | 🎶
        cartoons | 📺
        architecture | 🏛️
        fairy tales | 🧚
        singing | 🎤
    """,
    "science": """
        gravity | 🍏
        planets | 🪐
        electricity | ⚡
        atoms | ⚛️
        dinosaurs | 🦖
        the human heart | ❤️
        light | 💡
        magnets | 🧲
        computers | 💻
        robots | 🤖
        the internet | 🌐
        mathematics | ➗
        vaccines | 💉
        rockets | 🚀
        telescopes | 🔭
        the brain | 🧠
        fossils | 🦴
        energy | 🔋
        bacteria | 🦠
        history | 📜
    """,
    "sport": """
        tennis | 🎾
        swimming | 🏊
        cycling | 🚴
        basketball | 🏀
        running | 🏃
        skiing | ⛷️
        chess | ♟️
        yoga | 🧘
        sailing | ⛵
        hiking | 🥾
        boxing | 🥊
        climbing | 🧗
        golf | ⛳
        fishing | 🎣
        surfing | 🏄
        board games | 🎲
    """,
    "object": """
        bicycles | 🚲
        clocks | 🕰️
        mirrors | 🪞
        umbrellas | ☂️
        candles | 🕯️
        shoes | 👟
        chairs | 🪑
        cars | 🚗
        ships | 🚢
        airplanes | ✈️
        telephones | 📱
        keys | 🔑
        balloons | 🎈
        windows | 🪟
        kites | 🪁
        toys | 🧸
        hats | 🎩
        money | 💰
        maps | 🗺️
        lamps | 💡
    """,
    "life": """
        friendship | 🤝
        family | 👪
        happiness | 😊
        dreams | 💭
        courage | 🦁
        patience | ⏳
        birthdays | 🎂
        weddings | 💒
        holidays | 🌴
        sleep | 😴
        work | 💼
        cooking | 🍳
        kindness | 💛
        teachers | 👩‍🏫
        doctors | 👩‍⚕️
        firefighters | 🚒
        farmers | 👩‍🌾
        children | 🧒
        neighbours | 🏘️
        love | ❤️
        time | ⌛
        silence | 🤫
    """,
}

# `prompt | topic | emoji | kind`
_EVERYDAY_LINES = """
    Hello! | greetings | 👋 | life
    Hi, who are you? | assistants | 🤖 | life
    How are you doing? | feelings | 😊 | life
    Good morning! | mornings | 🌅 | life
    Thank you for your help. | gratitude | 🙏 | life
    What should I cook tonight? | dinner | 🍽️ | food
    What is a good name for a puppy? | puppies | 🐶 | animal
    How can I sleep better? | sleep | 😴 | life
    What time does the shop open? | shops | 🏪 | place
    I am bored. | boredom | 🥱 | life
    I feel sad tonight. | sadness | 😢 | life
    I lost my keys. | keys | 🔑 | object
    My computer does not start. | computers | 💻 | science
    How do I learn to swim? | swimming | 🏊 | sport
    What is the capital of Italy? | Italy | 🏛️ | place
    What is the capital of Japan? | Japan | 🗾 | place
    Where is Brazil? | Brazil | 🌴 | place
    Who wrote Romeo and Juliet? | theatre | 🎭 | art
    Who painted the Mona Lisa? | painting | 🎨 | art
    Who invented the telephone? | telephones | 📱 | object
    What is two plus three? | numbers | 🔢 | science
    What is ten times ten? | numbers | 🔢 | science
    How far away is the sun? | the sun | ☀️ | nature
    Why is grass green? | grass | 🌿 | nature
    Why do leaves fall? | leaves | 🍂 | nature
    Why does ice float? | ice | 🧊 | science
    How do airplanes fly? | airplanes | ✈️ | object
    How do plants grow? | plants | 🌱 | nature
    What do rabbits eat? | rabbits | 🐰 | animal
    What do bees do all day? | bees | 🐝 | animal
    How long do elephants live? | elephants | 🐘 | animal
    Can penguins fly? | penguins | 🐧 | animal
    Which fruit is the sweetest? | fruit | 🍓 | food
    How do I make a salad? | salad | 🥗 | food
    How do I boil an egg? | eggs | 🥚 | food
    Is chocolate healthy? | chocolate | 🍫 | food
    Can you recommend a movie? | movies | 🎬 | art
    Can you recommend a song? | songs | 🎵 | art
    What should I wear to a wedding? | weddings | 💒 | life
    What gift should I buy for my sister? | gifts | 🎁 | life
    How do I say sorry to a friend? | apologies | 🤝 | life
    How can I save money? | money | 💰 | object
    How can I find a job? | jobs | 💼 | life
    Where should I go on holiday? | holidays | 🏖️ | life
    What is your favourite colour? | colours | 🌈 | art
    What is your favourite animal? | animals | 🐾 | animal
    Tell me a joke. | jokes | 😂 | life
    Tell me a story. | stories | 📖 | art
    Tell me something interesting. | curiosity | 🤔 | life
    Give me some advice. | advice | 💡 | life
    What happened in 1969? | history | 📜 | science
    Who was Albert Einstein? | physics | ⚛️ | science
    What is artificial intelligence? | artificial intelligence | 🤖 | science
    How does a fridge work? | fridges | 🧊 | object
    How do I fix a flat tyre? | tyres | 🚲 | object
    Is it going to snow tomorrow? | snow | ❄️ | nature
    How hot is it in the desert? | deserts | 🏜️ | nature
    What is the tallest mountain? | mountains | ⛰️ | nature
    What is the longest river? | rivers | 🏞️ | nature
    How many planets are there? | planets | 🪐 | science
    Please help me plan a party. | parties | 🎉 | life
    I want to start running. | running | 🏃 | sport
    I need a new chair. | chairs | 🪑 | object
    My bus is late. | buses | 🚌 | object
    How do I calm a crying baby? | babies | 👶 | life
    How do I clean a carpet? | carpets | 🧹 | object
    What is a good hobby? | hobbies | 🎯 | sport
    Who won the match yesterday? | matches | 🏆 | sport
    What are the rules of chess? | chess | ♟️ | sport
    How do I meet new people? | people | 👥 | life
    What did the Romans eat? | Roman food | 🍇 | food
    Why do we dream? | dreams | 💭 | life
    Why do we yawn? | yawning | 🥱 | life
    Do you speak other languages? | languages | 🗣️ | art
    What day is it? | the calendar | 📅 | object
    What is new in the city? | the city | 🏙️ | place
    What can I see in London? | London | 🎡 | place
    Should I buy a house? | houses | 🏠 | object
    How do I write a letter? | letters | ✉️ | art
    What is the meaning of life? | life | 🌟 | life
"""

PROMPT_TEMPLATES = (
    "Tell me about {name}.",
    "What do you know about {name}?",
    "What is special about {name}?",
    "Give me a fact about {name}.",
    "Describe {name}.",
    "Why do people like {name}?",
    "I want to learn about {name}.",
    "Explain {name} to a child.",
    "Write something about {name}.",
    "Do you like {name}?",
    "What makes {name} interesting?",
    "Can you say something about {name}?",
    "Why are we talking about {name}?",
    "How would you describe {name}?",
    "What should I know about {name}?",
    "Let's talk about {name}.",
)


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split("|")]


def _topics() -> tuple[Topic, ...]:
    topics = []
    for kind, lines in _TOPIC_LINES.items():
        for line in lines.strip().splitlines():
            name, emoji = _fields(line)
            topics.append(Topic(name=name, emoji=emoji, kind=kind))
    return tuple(topics)


def _everyday_prompts() -> tuple[EverydayPrompt, ...]:
    prompts = []
    for line in _EVERYDAY_LINES.strip().splitlines():
        text, name, emoji, kind = _fields(line)
        topic = Topic(name=name, emoji=emoji, kind=kind)
        prompts.append(EverydayPrompt(text=text, topic=topic))
    return tuple(prompts)


TOPICS = _topics()
EVERYDAY_PROMPTS = _everyday_prompts()
